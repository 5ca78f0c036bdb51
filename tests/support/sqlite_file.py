"""Makes SQLite files from rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_tables(
    path: Path | str, tables: Mapping[str, list[dict[str, Any]]], statements: Iterable[str] = ()
) -> Path:
    """A database of these tables, with the columns of all their rows; then `statements` are executed."""
    path = Path(path)
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA page_size = 512")
    with connection:
        for table, rows in tables.items():
            columns = list(dict.fromkeys(name for row in rows for name in row))
            kinds = [f'"{name}" INTEGER PRIMARY KEY' if name == "id" else f'"{name}"' for name in columns]
            connection.execute(f'CREATE TABLE "{table}" ({", ".join(kinds)})')
            places = ", ".join("?" for _ in columns)
            connection.executemany(
                f'INSERT INTO "{table}" VALUES ({places})',
                [[row.get(name) for name in columns] for row in rows],
            )
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path
