"""DataFrames as parquet files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ir.core.errors import check_installed

if TYPE_CHECKING:
    from pandas import DataFrame


def parquet_files(tables: Mapping[str, DataFrame]) -> dict[str, bytes | str]:
    """NAME.parquet of each table.

    Raises PiperError (missing_dependency): pyarrow is not installed.
    """
    check_installed("pyarrow", "parquet", "parquet files")
    out: dict[str, bytes | str] = {}
    for name, table in tables.items():
        buffer = io.BytesIO()
        table.to_parquet(buffer, engine="pyarrow")
        out[f"{name}.parquet"] = buffer.getvalue()
    return out
