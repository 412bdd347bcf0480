"""Draws the pictures of docs/concepts.md and docs/fleet.md: `make pictures`.

Plain SVG of boxes, cells, lines and text. A picture has a ground of its own, and follows the reader's light or
dark scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 720
COLUMN = 6.5  # of a terminal
STYLE = """
.ground{fill:#fbfbfa;stroke:#d9d9d4}
text{fill:#22252a;font:13px system-ui,sans-serif}
.small{font-size:11px;fill:#5c6269}
.head{font-weight:600}
.mono{font-family:ui-monospace,monospace;font-size:12px}
.plain{fill:#ffffff;stroke:#9aa0a6}
.shared{fill:#cfe3f7;stroke:#3f7cb8}
.own{fill:#fde6c4;stroke:#c98a2b}
.free{fill:none;stroke:#b4b8bd;stroke-dasharray:3 3}
.locked{fill:#cfe3f7;stroke:#1f4e7a;stroke-width:2.5}
.line{stroke:#7c828a;fill:none;stroke-width:1.4}
.tip{fill:#7c828a}
@media (prefers-color-scheme:dark){
.ground{fill:#16191d;stroke:#30353b}
text{fill:#e4e6e8}
.small{fill:#a3a9b0}
.plain{fill:#22272d;stroke:#6d747c}
.shared{fill:#1d3f5e;stroke:#6aa5dc}
.own{fill:#5a3f14;stroke:#e0a84e}
.free{stroke:#565c63}
.locked{fill:#1d3f5e;stroke:#a8d2fa}
.line{stroke:#989ea6}
.tip{fill:#989ea6}
}"""


class Picture:
    """An SVG under construction; x and y in pixels from the upper left corner.

    Args:
        title: what screen readers say.
        height: in pixels.
    """

    def __init__(self, title: str, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            f' role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
            ' orient="auto-start-reverse"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        ]

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Writes one line, whose baseline is at `y`; kind: `small`, `head`, `mono` or several of them."""
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, label: str = "", kind: str = "plain") -> None:
        """Draws a box with a label in its middle."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + 4.5, label, anchor="middle")

    def cells(self, x: float, y: float, labels: Sequence[str], kinds: Sequence[str], size: tuple[int, int]) -> None:
        """Draws boxes in a row without gaps."""
        width, height = size
        for number, (label, kind) in enumerate(zip(labels, kinds, strict=True)):
            self._parts.append(
                f'<rect class="{kind}" x="{x + number * width:g}" y="{y:g}" width="{width}" height="{height}"/>'
            )
            self.text(x + (number + 0.5) * width, y + height / 2 + 4, label, "mono", "middle")

    def line(self, *points: tuple[float, float], tip: bool = False) -> None:
        """Draws straight lines through the points; with a tip, an arrow."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        self._parts.append(f'<path class="line" d="M{path}"{end}/>')

    def row(self, x: float, y: float, text: str) -> None:
        """Writes one line of a terminal, in columns of equal width whatever the font is."""
        self._parts.append(
            f'<text class="mono" x="{x:g}" y="{y:g}" xml:space="preserve" textLength="{COLUMN * len(text):g}"'
            f' lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Returns the file."""
        return "\n".join([*self._parts, "</svg>\n"])


def tree() -> Picture:
    """Three requests, and the tree that they make."""
    picture = Picture("Three requests, and the tree of their prefixes", 270)
    picture.text(20, 30, "three requests", "head")
    for row, (document, question) in enumerate((("document A", "question 1"), ("document A", "question 2"),
                                                ("document B", "question 3"))):  # fmt: skip
        y = 48 + 66 * row
        picture.box(20, y, 112, 34, "system prompt", "shared")
        picture.box(132, y, 92, 34, document, "shared" if row < 2 else "plain")
        picture.box(224, y, 86, 34, question)
    picture.text(20, 252, "blue: what more than one request begins with", "small")
    picture.text(400, 30, "one tree", "head")
    picture.line((530, 48), (530, 62))
    picture.line((530, 94), (530, 112), (455, 112), (455, 126))
    picture.line((530, 112), (640, 112), (640, 126))
    picture.line((455, 160), (455, 178), (405, 178), (405, 192))
    picture.line((455, 178), (510, 178), (510, 192))
    picture.line((640, 160), (640, 192))
    picture.text(530, 44, "root: a namespace", "small", "middle")
    picture.box(465, 60, 130, 34, "system prompt", "shared")
    picture.box(400, 126, 110, 34, "document A", "shared")
    picture.box(585, 126, 110, 34, "document B")
    picture.box(360, 192, 90, 34, "question 1")
    picture.box(465, 192, 90, 34, "question 2")
    picture.box(595, 192, 90, 34, "question 3")
    picture.text(400, 252, "each box is a node; each is computed once", "small")
    return picture


def pages() -> Picture:
    """Tokens, pages, memory."""
    picture = Picture("Tokens, their pages, and where these lie in memory", 270)
    picture.text(20, 52, "tokens", "head")
    tokens = ["The", "ferry", "to", "the", "isle", "goes", "at", "nine", "each", "day", "but", "Sun."]
    kinds = ["shared"] * 4 + ["own"] * 4 + ["plain"] * 4
    picture.cells(120, 34, tokens, kinds, (48, 30))
    picture.text(20, 118, "page table", "head")
    for at, page, kind in ((0, 5, "shared"), (1, 1, "own"), (2, 6, "plain")):
        picture.line((216 + 192 * at, 66), (216 + 192 * at, 96), tip=True)
        picture.box(176 + 192 * at, 98, 80, 32, f"page {page}", kind)
    picture.text(20, 218, "memory", "head")
    for page in range(8):
        kind = {5: "shared", 1: "own", 6: "plain"}.get(page, "free")
        picture.cells(120 + 72 * page, 200, [""] * 4, [kind] * 4, (17, 30))
        picture.text(120 + 72 * page + 34, 248, str(page), "small mono", "middle")
    for at, page in ((0, 5), (1, 1), (2, 6)):
        picture.line((216 + 192 * at, 132), (154 + 72 * page, 198), tip=True)
    return picture


def match() -> Picture:
    """A prompt beside the path that it agrees with."""
    picture = Picture("A prompt that agrees with two nodes, and then parts from the tree", 260)
    picture.text(20, 62, "new prompt", "head")
    picture.cells(130, 42, [f"p{n}" for n in range(8)], ["shared"] * 5 + ["own"] * 3, (66, 32))
    picture.text(20, 142, "the tree", "head")
    picture.cells(130, 122, ["p0", "p1"], ["shared"] * 2, (66, 32))
    picture.cells(278, 122, ["p2", "p3", "p4"], ["shared"] * 3, (66, 32))
    picture.cells(492, 122, ["x5", "x6"], ["plain"] * 2, (66, 32))
    picture.line((262, 138), (276, 138), tip=True)
    picture.line((476, 138), (490, 138), tip=True)
    for at in (0, 1, 2, 3, 4):
        picture.line((163 + 66 * at, 76), (163 + 66 * at + (16 if at > 1 else 0), 120))
    picture.line((493, 76), (525, 120))
    picture.text(522, 102, "differs", "small")
    picture.line((130, 186), (130, 194), (460, 194), (460, 186))
    picture.text(295, 214, "hit: five pages that need no compute", anchor="middle")
    picture.text(570, 214, "three pages to compute", anchor="middle")
    picture.text(130, 242, "p0, p1, ...: one page each, known by all of its tokens and all before it", "small")
    return picture


def split() -> Picture:
    """A node before and after."""
    picture = Picture("A node before and after it is split", 250)
    picture.text(20, 30, "before", "head")
    picture.text(20, 62, "node N", "small")
    picture.cells(20, 70, ["5", "1", "6", "3"], ["shared"] * 2 + ["plain"] * 2, (40, 32))
    picture.text(20, 136, "a prompt that parts after two pages", "small")
    picture.cells(20, 144, ["5", "1", "7"], ["shared"] * 2 + ["own"], (40, 32))
    picture.line((250, 116), (320, 116), tip=True)
    picture.text(380, 30, "after", "head")
    picture.text(380, 88, "node U, new", "small")
    picture.cells(380, 96, ["5", "1"], ["shared"] * 2, (40, 32))
    picture.line((460, 112), (490, 112), (490, 66), (518, 66), tip=True)
    picture.line((490, 112), (490, 166), (518, 166), tip=True)
    picture.text(520, 42, "node N, the same handle", "small")
    picture.cells(520, 50, ["6", "3"], ["plain"] * 2, (40, 32))
    picture.text(520, 142, "the new prompt's own node", "small")
    picture.cells(520, 150, ["7"], ["own"], (40, 32))
    picture.text(20, 226, "Numbers are page ids. Ids divide, pages stay where they are: no KV is copied.", "small")
    return picture


def lease() -> Picture:
    """The calls of a lease in time, and the pages after each."""
    picture = Picture("The calls of a lease, and what its pages are after each", 270)
    steps = (
        ("lease(prompt)", "match, lock", ["shared"] * 2 + ["free"] * 3),
        ("reserve(n)", "pages for the rest", ["shared"] * 2 + ["own"] * 2 + ["free"]),
        ("publish(upto)", "others may use them", ["shared"] * 4 + ["free"]),
        ("append, reserve", "decoded tokens", ["shared"] * 4 + ["own"]),
        ("finish()", "unlock", ["shared"] * 5),
    )
    for number, (call, what, kinds) in enumerate(steps):
        x = 20 + 140 * number
        picture.text(x, 40, call, "mono head")
        picture.text(x, 60, what, "small")
        picture.cells(x, 84, [""] * 5, kinds, (22, 36))
        if number:
            picture.line((x - 26, 102), (x - 6, 102), tip=True)
    picture.cells(20, 160, [""], ["free"], (22, 26))
    picture.text(52, 178, "free: nobody's")
    picture.cells(190, 160, [""], ["own"], (22, 26))
    picture.text(222, 178, "private: this lease's alone")
    picture.cells(430, 160, [""], ["shared"], (22, 26))
    picture.text(462, 178, "cached: the tree's; others match it")
    picture.text(20, 224, "abort(), or an exception: private pages become free; what was published stays.", "small")
    picture.text(20, 246, "publish() of what another request has published meanwhile: the duplicate is freed.", "small")
    return picture


def eviction() -> Picture:
    """Locks on a path, and the order of the leaves."""
    picture = Picture("Locked nodes stay, leaves are evicted in the order of the policy", 290)
    picture.line((360, 62), (360, 82), (190, 82), (190, 102))
    picture.line((360, 82), (540, 82), (540, 102))
    picture.line((190, 138), (190, 160), (105, 160), (105, 182))
    picture.line((190, 160), (275, 160), (275, 182))
    picture.line((540, 138), (540, 160), (455, 160), (455, 182))
    picture.line((540, 160), (625, 160), (625, 182))
    for x, y, label, kind in (
        (295, 26, "locks: 2", "locked"),
        (125, 102, "locks: 2", "locked"),
        (475, 102, "not yet a leaf", "plain"),
        (40, 182, "locks: 1", "locked"),
        (210, 182, "locks: 1", "locked"),
        (390, 182, "second", "own"),
        (560, 182, "first", "own"),
    ):
        picture.box(x, y, 130, 36, label, kind)
    picture.text(105, 238, "request 1 runs", "small", "middle")
    picture.text(275, 238, "request 2 runs", "small", "middle")
    picture.text(540, 238, "used longest ago: evicted first (LRU)", "small", "middle")
    picture.text(
        20, 272, "A lock counts on the whole path. The parent on the right can go once both leaves are gone.", "small"
    )
    return picture


def tiers() -> Picture:
    """Three tiers and the copies between them."""
    picture = Picture("Device, host and storage, with the copies between them", 300)
    rows = (
        ("device", "tier 0: attention reads here", 4, 30),
        ("host", "tier 1: pinned memory", 8, 130),
        ("storage", "files, Redis, S3, peers, ...", 14, 230),
    )
    for name, what, count, y in rows:
        picture.text(20, y + 16, name, "head")
        picture.text(20, y + 34, what, "small")
        picture.cells(220, y, [""] * count, ["shared"] * count, (24, 36))
    for y, down, up in ((70, "back up", "load"), (170, "write", "prefetch")):
        picture.line((240, y), (240, y + 56), tip=True)
        picture.text(252, y + 32, down)
        picture.line((350, y + 56), (350, y), tip=True)
        picture.text(362, y + 32, up)
    picture.text(440, 84, "down: before room is needed")
    picture.text(440, 104, "up: layer by layer, while the model computes", "small")
    picture.text(440, 184, "down: sealed, by threads of their own")
    picture.text(440, 204, "up: verified, with a deadline; else computed", "small")
    return picture


def components() -> Picture:
    """What each kind of layer keeps of one path, and where a hit may end."""
    picture = Picture("Full attention, a window and states over one path, and where a hit may end", 270)
    rows = (
        ("full attention", "every page from the root", "11111111"),
        ("window", "the last two pages", "00110011"),
        ("state", "one, at its end", "00010001"),
    )
    for number, (name, what, kept) in enumerate(rows):
        y = 30 + 60 * number
        picture.text(20, y + 14, name, "head")
        picture.text(20, y + 30, what, "small")
        kinds = ["shared" if one == "1" else "free" for one in kept]
        picture.cells(200, y, [""] * 8, kinds, (60, 36))
    for x in (440, 680):
        picture.line((x, 22), (x, 206))
        picture.line((x, 224), (x, 208), tip=True)
    picture.text(440, 240, "a hit may end here", anchor="middle")
    picture.text(674, 240, "and here", anchor="end")
    picture.text(20, 258, "Nowhere else can all three go on.", "small")
    return picture


def fleet() -> Picture:
    """The processes of a fleet, and what goes between them."""
    picture = Picture("A fleet: one front, replicas that are peers, one store", 400)
    picture.box(20, 40, 110, 40, "clients")
    picture.line((130, 60), (186, 60), tip=True)
    picture.text(158, 50, "HTTP", "small", "middle")
    picture.box(190, 40, 130, 40, "Serve's proxy")
    picture.line((320, 60), (366, 60), tip=True)
    picture.box(370, 22, 330, 76)
    picture.text(535, 42, "front", "head", "middle")
    picture.text(535, 62, "reads the prompt; keeps what was sent of a stream;", "small", "middle")
    picture.text(535, 78, "router: which replica has the longest prefix", "small", "middle")
    for x, name in ((130, "replica A"), (450, "replica B")):
        picture.box(x, 160, 180, 130)
        picture.text(x + 90, 180, name, "head", "middle")
        picture.cells(x + 20, 194, [""] * 5, ["shared"] * 5, (28, 24))
        picture.text(x + 20, 234, "device", "small")
        picture.cells(x + 20, 244, [""] * 5, ["shared"] * 5, (28, 24))
        picture.text(x + 20, 284, "host: given to peers", "small")
    picture.line((440, 98), (440, 124), (220, 124), (220, 156), tip=True)
    picture.line((540, 98), (540, 156), tip=True)
    picture.text(230, 118, "requests", "small")
    picture.line((600, 156), (600, 102), tip=True)
    picture.text(608, 134, "events, addresses", "small")
    picture.line((314, 256), (446, 256), tip=True)
    picture.line((446, 270), (314, 270), tip=True)
    picture.text(380, 246, "pages, sealed", "small", "middle")
    picture.box(190, 340, 380, 40, "one store for all", "own")
    for x in (220, 540):
        picture.line((x - 10, 290), (x - 10, 336), tip=True)
        picture.line((x + 10, 336), (x + 10, 294), tip=True)
    picture.text(236, 318, "what was computed", "small")
    picture.text(524, 318, "what another one wrote", "small", "end")
    return picture


PICTURES: tuple[Callable[[], Picture], ...] = (tree, pages, match, split, lease, eviction, tiers, components, fleet)


def main() -> None:
    """Writes every picture."""
    FOLDER.mkdir(exist_ok=True)
    for draw in PICTURES:
        (FOLDER / f"{draw.__name__}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
