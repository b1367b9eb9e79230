"""Models, tokenizers and llama.cpp as others have published them, fetched once and kept in the user's cache."""
