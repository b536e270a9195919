"""Names as people give them to files, and what no name may be."""

from __future__ import annotations

ODD_NAMES = ("my lora", "花", "a(b)[c]", "_x", 'a"b#c?d%e+f', "Ünïcödé", "שלום", "50%", "a'b", "~root", "{x}=1,y", "…")
"""Each is served under itself."""

NO_NAMES = (
    "", ".", "..", "a/b", "a\\b", "a:b", "a<b", "a>b", " a", "a ", "a\u3000", "a\n", "a\tb", "a\0b", "a\u200bb",
    "a\u202eb", "a\ud800b", "\u00ade", "e\u0301", "a" * 201,
)  # fmt: skip
