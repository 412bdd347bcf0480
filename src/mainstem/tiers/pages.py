"""Stored pages: their keys, and the header that says whose content it is.

    header   magic 8 | key 32 | payload bytes 8 | codec 8 | tag 32 | zero          128 bytes
    payload  the page's content

A key is a keyed BLAKE3 over the parent's key and the page's symbols; the first parent is one over the identity and the
namespace. So two pages have one key only if everything that shaped them is the same. The tag is a keyed BLAKE3 over
the header up to it and the payload: what was damaged, cut, put elsewhere or made by others does not verify.
Specification of BLAKE3 and its keyed mode: https://github.com/BLAKE3-team/BLAKE3-specs.
"""

from __future__ import annotations
