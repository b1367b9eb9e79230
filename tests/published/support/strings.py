"""Some 300 texts that tokenizers treat differently: scripts, emoji, code, whitespace, look-alikes of tokens, junk."""

from __future__ import annotations

import random

_SCRIPTS = """\
The quick brown fox jumps over the lazy dog, doesn't it?
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.
Voix ambiguë d'un cœur qui, au zéphyr, préfère les jattes de kiwis.
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío.
Luís argüia à Júlia que «brações, fé, chá, óxido, pôr» eram palavras.
Pchnąć w tę łódź jeża lub ośm skrzyń fig.
Příliš žluťoučký kůň úpěl ďábelské ódy.
Árvíztűrő tükörfúrógép.
Pijamalı hasta yağız şoföre çabucak güvendi. İıIi
Съешь же ещё этих мягких французских булок, да выпей чаю.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.
עטלף אבק נס דרך מזגן שהתפוצץ כי חם
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر
درباره‌ی زبان فارسی می‌نویسیم
यह एक छोटा वाक्य है, क्षत्रिय।
আমি বাংলায় গান গাই।
தமிழ் ஒரு செம்மொழி.
తెలుగు లిపి అందమైనది.
ಕನ್ನಡ ನುಡಿ
മലയാളം ഭാഷ
ગુજરાતી લિપિ
ਪੰਜਾਬੀ ਭਾਸ਼ਾ
සිංහල අකුරු
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า
ພາສາລາວ
မြန်မာဘာသာ
ភាសាខ្មែរ
བོད་ཡིག
ქართული ენა
Հայերեն լեզու
አማርኛ ቋንቋ
いろはにほへと ちりぬるを、カタカナもｶﾅも。
天地玄黃，宇宙洪荒。这是一个测试。
키스의 고유조건은 입술끼리 만나야 하고
Tiếng Việt có dấu thanh điệu: ằ ẵ ậ
ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ
ᚠᛇᚻ᛫ᛒᛦᚦ᛫ᚠᚱᚩᚠᚢᚱ
𐍈 𒀀 𓂀 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛
mixed العربية and עברית and 中文 in one line
ﬁ ﬂ ½ ² ℌ Å Å ﷺ"""
_EMOJI = "😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ☕️ ❤ ❤️ 1️⃣ 🫠 🧑🏿‍🚀 ©® ™ ♟️ 🀄 🂡"
_CODE = [
    "def f(x: int = 3, *args) -> None:\n\treturn x ** 2  # done\n",
    "for (let i = 0; i < 10; ++i) { console.log(`${i}`); }",
    "#include <vector>\nint main() { std::vector<int> v{1, 2}; return v[0] << 3; }",
    "fn main() -> Result<(), Box<dyn Error>> { let x = &mut y?; Ok(()) }",
    "SELECT * FROM t WHERE a >= 1 AND b != 'x''y' -- end",
    '{"a": [1, 2.5e-3, null], "b\\n": "\\u00e9"}',
    '<div class="a"><!-- c --><br/>&nbsp;&#39;</div>',
    "if [[ $x =~ ^[0-9]+$ ]]; then echo \"$((x+1))\" | sed 's/a/b/g'; fi",
    "\\begin{equation}\\int_0^\\infty e^{-x^2}\\,dx\\end{equation}",
    "main :: IO ()\nmain = mapM_ print $ filter (>3) [1..]",
    "public static void main(String[] args) throws Exception {\n        return;\n}",
    "x = a if b else c; y := 3; z <- 4; w => 5; v |> f; a ??= b",
    "@@ -1,3 +1,4 @@\n-old\n+new\n context",
    "key: value\n  - item\n  - {a: 1}\n---\n",
    "0x1F 0b1010 1_000_000 3.14159 1e10 .5 5. 1,000.00 +49 30 123456",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org C:\\dir\\file.txt",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE x1y2z3",
    "I'm you're he'll WE'VE it'S don't can’t 'tis rock'n'roll",
    "1 12 123 1234 12345 123456 1234567 12345678 2026-11-30T12:34:56Z",
    "!!! ??? ... --- *** ### ~~~ ``` === <<<>>> ::: ;;; ,,, ((([[[{{{",
]
_SPACES = [
    "", " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", "\r\n", "\r", " \n", "\n ", " \n \n ", "\t \t", "a ",
    " a", "  a", "a  b", "a   b", "a\nb", "a\n\nb", "a \n b", "a\t\tb", "a\r\nb\r\n", "    indented",
    "\n    indented\n", "trailing   ", "\u00a0a\u00a0b", "a\u2003b\u3000c", "zero\u200bwidth\u200djoin", "\ufeffmark",
    "a\u2028b\u2029c", "\v\f", " " * 17, "\n" * 9, "\t" * 5, "a" + " " * 40 + "b", "▁", "▁a▁b", " ▁ ", "Ġ Ċ ĉ",
]  # fmt: skip
_TOKENS = [
    "<|im_start|>", "<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n", " <|im_end|> ", "<|im_end|", "<|endoftext|>",
    "<| im_end |>", "<<|im_end|>>", "<bos>", "<eos>", "<s>", "</s>", "<unk>", "<pad>",
    "<start_of_turn>user\nHi<end_of_turn>", "<start_of_turn", "<0x0A>", "<0xE4>", "<0x00", "[INST] a [/INST]",
    "<<SYS>>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>a<|end_header_id|>", "<｜begin▁of▁sentence｜>",
    "<｜User｜>", "<|channel|>final<|message|>", "<|", "|>", "<think>\n</think>", "<tool_call>\n{}</tool_call>",
    "<unused0>", "<unused99>a", "<image>", "<start_of_image>", "<repo_name>a", "<file_sep>", "<reponame>",
    "<jupyter_start>", "<fim_prefix>a<fim_suffix>", "<mask>", "<h1>", "</h1>", "<table>", "[multimodal]", "[@BOS@]",
    "<filename>", "<gh_stars>", "<issue_start>", "<|END_OF_TURN_TOKEN|>",
]  # fmt: skip


def _junk(draw: random.Random) -> list[str]:
    """Return what bytes at random read as, and characters at random."""
    rows = [draw.randbytes(24) for _ in range(40)]
    read = [row.decode("utf-8", "replace") for row in rows[:20]] + [row.decode("latin-1") for row in rows[20:]]
    planes = [range(0x20), range(0x80, 0x250), range(0x300, 0x370), range(0x2000, 0x2C00), range(0x1F300, 0x1FAFF)]
    planes += [range(0x4E00, 0x9FFF), range(0xE000, 0xE100), range(0x10000, 0x10FFF), range(0xE0001, 0xE0080)]
    return read + ["".join(map(chr, draw.choices(plane, k=12))) for plane in planes for _ in range(4)]


def _mixed(draw: random.Random, parts: list[str]) -> list[str]:
    return ["".join(draw.choices(parts, k=3)) for _ in range(40)]


def texts() -> list[str]:
    """Return the texts, the same each time."""
    draw = random.Random(7)
    known = [*_SCRIPTS.split("\n"), *_EMOJI.split(" "), _EMOJI, *_CODE, *_SPACES, *_TOKENS]
    return [*known, *_junk(draw), *_mixed(draw, known)]
