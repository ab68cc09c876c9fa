"""Pages of Nsight Compute's CSV made up for tests, and how a bad one is answered."""

from pathlib import Path

import pytest

from profiling.errors import UserError
from profiling.ncu.pages import read_pages

DATA = Path(__file__).parent / "data" / "ncu" / "pages"
REAL = sorted(DATA.glob("*.csv"))
LAUNCH = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
LAUNCH += ["Block Size", "Grid Size", "Device", "CC"]
METRIC = ["Section Name", "Metric Name", "Metric Unit", "Metric Value"]
RULE = ["Rule Name", "Rule Type", "Rule Description", "Estimated Speedup Type", "Estimated Speedup"]
NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
NVTX_IDS = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def line(*fields, separator=","):
    return separator.join('"' + field.replace('"', '""') + '"' for field in fields) + "\n"


def who(id="0", process="77", kernel="kernel", block="(256, 1, 1)", grid="(132, 1, 1)"):
    return [id, process, "python3", "127.0.0.1", kernel, "1", "7", block, grid, "0", "9.0"]


def raw_page(metrics, rows, *, separator=",", units=True):
    """A raw page: metrics as {name: unit}, rows as (launch columns, cells)."""
    text = line(*LAUNCH, *metrics, separator=separator)
    if units:
        text += line(*[""] * len(LAUNCH), *metrics.values(), separator=separator)
    return text + "".join(line(*launch, *cells, separator=separator) for launch, cells in rows)


def metric_line(launch, section, label, unit, value):
    return line(*launch, section, label, unit, value).rstrip("\n") + ",\n"


def details_page(*rows):
    return line(*LAUNCH, *METRIC, *RULE) + "".join(rows)


def reader(folder):
    """Reads a page's content, by way of a file."""

    def read(content, **options):
        path = folder / "page.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_pages(path, **options)

    return read


def refused(read, content, *words, **options):
    """The one line that a bad file is answered with."""
    with pytest.raises(UserError) as error:
        read(content, **options)
    message = str(error.value)
    assert "page.csv" in message and "\n" not in message
    for word in words:
        assert word in message, message
    return message
