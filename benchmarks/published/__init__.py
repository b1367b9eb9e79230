"""What others have published: models, tokenizers and llama.cpp, fetched once and kept in the user's cache."""
