"""Names the scripts written without spaces between words, as parts of sets of the module `regex` (its VERSION1)."""

SPACELESS = r"\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
KOREAN = r"\p{Hangul}"
"""Has spaces, but particles at its words."""
