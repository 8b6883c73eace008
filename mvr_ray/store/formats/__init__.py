"""Read sources and write rankings in the formats of other programs; `docs/formats.md` has them field by field."""
