"""Connections: their protocol around aiohttp's parser, and how many there may be."""
