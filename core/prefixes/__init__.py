"""Prefixes that requests share: what is cached, who gets it, in which order, what stays, what survives a restart."""
