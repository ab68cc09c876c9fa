"""Offline HTML: templates with escaping always on, figures as inert JSON, plotly.js once. No network, by policy too.

A page carries a Content-Security-Policy that lets it load nothing and run no script but its own, so that a file opened
years later, or one whose recording holds hostile text, does what it did on the first day.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from profiling import text
from profiling.errors import UserError
from profiling.files import replacing

if TYPE_CHECKING:
    import plotly.graph_objects as go

GENERATOR = "profiling report"
PLOTLY_FILE = "plotly.min.js"
HERE = Path(__file__).parent / "templates"


def render(template: str, *, inline_plotly: bool, **context: Any) -> str:
    """A page from a template of `profiling/templates`, its scripts admitted by their hashes."""
    draw = (HERE / "draw.js").read_text(encoding="utf-8")
    plotly = plotly_js() if inline_plotly else ""
    allowed = [script_hash(source) for source in (draw, plotly) if source]
    # Browsers differ in whether a file's folder counts as 'self', so its scheme is named too.
    policy = f"default-src 'none'; script-src {' '.join(allowed)}" + ("" if inline_plotly else " 'self' file:")
    policy += "; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return (
        environment()
        .get_template(template)
        .render(
            **context,
            policy=policy,
            generator=GENERATOR,
            style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
            draw=Markup(draw),
            plotly=Markup(plotly),
            plotly_file=PLOTLY_FILE,
        )
    )


def environment() -> jinja2.Environment:
    """Templates with escaping on whatever they are called, and an error for a name that is not given."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "duration": text.duration,
        "percent": text.percent,
        "significant": text.significant,
        "times": text.times,
        "number": lambda value: text.count(value) if value >= 0 else "–",
        "plain": text.plain,
        "together": text.together,
        "figure": figure_json,
    }
    return made


def figure_json(figure: "go.Figure") -> Markup:
    """A figure as JSON that is inert inside <script type="application/json">: no tag and no comment can start in it."""
    source = figure.to_json(validate=False)
    for character in "<>&\u2028\u2029":
        source = source.replace(character, f"\\u{ord(character):04x}")
    return Markup(source)


def plotly_js() -> str:
    """plotly.js, minified, as the Python package brings it."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def script_hash(source: str) -> str:
    """The CSP source that admits exactly this inline script."""
    digest = hashlib.sha256(source.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def write_figures(figures: "Sequence[go.Figure] | go.Figure", path: str | Path, title: str = "") -> Path:
    """Write figures as one self-contained HTML file of about 5 MB, nearly all of it plotly.js.

    Raises
    ------
    UserError : the file cannot be written.
    """
    drawn = list(figures) if isinstance(figures, list | tuple) else [figures]
    path = Path(path)
    write(path, render("figures.html", inline_plotly=True, title=title or "Figures", figures=drawn))
    return path


def write(path: Path, content: str) -> None:
    """Write a text file, making its folder; in one step, so that a page half written never stays.

    Raises
    ------
    UserError : the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}); choose another place with -o"
        ) from error
