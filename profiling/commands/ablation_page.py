"""``ablation-page``: the page of an ablation again, from what was kept of it."""

from profiling.commands import arguments, printing
from profiling.commands.diff_report import Folder


def ablation_page(folder: Folder, json: arguments.Json = False) -> None:
    """Write an ablation's page and Markdown again, from its results.json.

    What is committed of an ablation is its results and samples; the page, with the plotting library beside it, comes
    from them.

    \b
    Examples:
      python -m profiling ablation-page reports/ablation/hsp-half-empty-forward
    """
    from profiling.ablation.report import write_report
    from profiling.ablation.results import read

    page = write_report(read(folder), folder if folder.is_dir() else folder.parent)
    if json:
        printing.document({"page": str(page)})
    else:
        printing.line(f"report: {page}")
