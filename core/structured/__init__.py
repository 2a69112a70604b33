"""Structured output: grammars that an answer must follow, compiled once and followed token by token. No torch."""
