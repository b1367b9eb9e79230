"""Lua that Envoy runs on a request: what API keys and tokens say of a client, and its name in a body of ``generate``.

Envoy's own filters for keys and tokens read less than the standards allow, and Triton hands no header on to the stages
at ``generate``, but every field of the body that is no input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from inflight.contract import CLIENT

_BEARER = """\
local function credential(headers)
  local given = headers:get("authorization")
  return given and given:match("^[Bb][Ee][Aa][Rr][Ee][Rr] +([^ ]+) *$")
end
local function refuse(handle)
  handle:respond({[":status"] = "401", ["www-authenticate"] = "Bearer"}, "")
end
"""
"""The scheme's case does not count, and spaces part it from what follows (RFC 9110, 11.1)."""

_KEYS = (
    _BEARER
    + """\
local clients = %s
function envoy_on_request(handle)
  local headers = handle:headers()
  local name = clients[credential(headers) or ""] or clients[headers:get("x-api-key") or ""]
  if name == nil then return refuse(handle) end
  headers:replace("%s", name)
end
"""
)

TOKEN_FORM = (
    _BEARER
    + """\
local values = {}
for index, byte in ipairs({("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"):byte(1, 64)}) do
  values[byte] = index - 1
end
local function decoded(text)
  local bits, count, characters = 0, 0, {}
  for index = 1, #text do
    bits, count = bits * 64 + (values[text:byte(index)] or 0), count + 6
    if count >= 8 then
      count = count - 8
      local byte = math.floor(bits / 2 ^ count)
      bits = bits - byte * 2 ^ count
      characters[#characters + 1] = string.char(byte)
    end
  end
  return table.concat(characters)
end
function envoy_on_request(handle)
  local headers = handle:headers()
  local token = credential(headers)
  if token == nil then return end
  headers:replace("authorization", "Bearer " .. token)
  local function unescaped(digits) return string.char(tonumber(digits, 16)) end
  local head = decoded(token:match("^[^.]*")):gsub("\\\\u00(%x%x)", unescaped)
  if head:find('"crit"%s*:') then refuse(handle) end
end
"""
)
"""Spells the scheme as Envoy's filter for tokens does, and refuses a token with ``crit``: it names extensions that
whoever does not know them must not ignore (RFC 7515, 4.1.11), and Envoy does."""

TOKEN_METADATA = "envoy.filters.http.jwt_authn", "token"
"""The metadata in which Envoy's filter for tokens leaves the claims."""
REFUSED = "x-inflight-refused"
"""The header of a request that a script refuses in words of its own."""
_LONGEST_NAME = 4096
"""Characters of a token's ``sub``, encoded: gRPC carries 8 KiB of headers."""
TOKEN_NAME = f"""\
local function escaped(character) return string.format("%%%02X", character:byte()) end
function envoy_on_request(handle)
  local found = handle:streamInfo():dynamicMetadata():get("{TOKEN_METADATA[0]}")
  local name = found and found["{TOKEN_METADATA[1]}"] and found["{TOKEN_METADATA[1]}"]["sub"]
  if type(name) ~= "string" or name == "" then return end
  name = name:gsub('[%c "%%\\\\\\128-\\255]', escaped)
  if #name > {_LONGEST_NAME} then
    handle:headers():replace("{REFUSED}", "sub")
    local why = "the token's sub has " .. #name .. " characters, encoded; the most is {_LONGEST_NAME}"
    return handle:respond({{[":status"] = "400"}}, why)
  end
  local is_address = name:find("^[%x.:]*$") and name:find("[.:]")
  if is_address or name:find("^%x*$") and (#name == 16 or #name == 64) then name = name:gsub("^.", escaped) end
  handle:headers():replace("{CLIENT}", name)
end
"""
"""Names the client by its token's ``sub``. What a header or a log cannot carry is percent-encoded, and so is the first
character of what could be another kind of client: an address, or the hash of a key or certificate."""

NAME_IN_BODY = f"""\
local spaces, key = "[ \\t\\r\\n]*", '"{CLIENT.replace("-", "%-")}"[ \\t\\r\\n]*:'
local function refuse(handle, why)
  handle:respond({{[":status"] = "400"}}, "INVALID_ARGUMENT: " .. why)
end
local function plain(digits)
  local character = string.char(tonumber(digits, 16))
  return character:find('["\\\\%c]') and "?" or character
end
function envoy_on_request(handle)
  local body = handle:body()
  if body == nil then return end
  local text = body:getBytes(0, body:length())
  local _, brace = text:find("^" .. spaces .. "{{")
  if brace == nil then return refuse(handle, "the body must be an object of JSON") end
  local _, said = text:find('^"{CLIENT.replace("-", "%-")}":"[^"\\\\]*",?', brace + 1)
  local rest = text:sub((said or brace) + 1)
  local spelt = rest:find("\\\\u00", 1, true) and rest:gsub("\\\\u00(%x%x)", plain) or rest
  if spelt:find(key) then return refuse(handle, "{CLIENT} is what the door says, and no field of a body") end
  local comma = rest:find("^" .. spaces .. "}}") and "" or ","
  local name = '"{CLIENT}":"' .. handle:headers():get("{CLIENT}") .. '"'
  handle:headers():replace("content-length", body:setBytes(text:sub(1, brace) .. name .. comma .. rest))
end
"""
"""Puts the client's name first into a body, in place of what a door before this one wrote.

It refuses a body that is no object of JSON, since Triton's reader skips more than white space before one, and another
field of that name in whatever spelling and depth, since Triton lets those of ``parameters`` win.
"""


def keys_script(clients: Mapping[str, str]) -> str:
    """Return what asks for one of the API keys of ``clients``, which says whose each is."""
    table = ",".join(f"[{_quoted(key)}]={_quoted(client)}" for key, client in clients.items())
    return _KEYS % (f"{{{table}}}", CLIENT)


def _quoted(text: str) -> str:
    """Return printable ASCII as a string of Lua, whose escapes of quotes and backslashes are those of JSON."""
    return json.dumps(text)
