"""JSON objects with attributes, and lists of them as tables.

Which keys there are is the schema's matter (docs/json.md), not this module's: a new key is an attribute at once.
"""

import copy
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Sequence, Union, overload

if TYPE_CHECKING:
    import pandas


class Record(Mapping[str, Any]):
    """A JSON object: `record.name` and `record["name"]` are the same. Objects in it are records, lists of them
    `Records`."""

    __slots__ = ("_data",)

    _data: Mapping[str, Any]

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return _wrapped(self._data[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        # Names that begin with `_` are Python's own, and looked up before there is any data.
        if not name.startswith("_"):
            try:
                return self[name]
            except KeyError:
                pass
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def __dir__(self) -> List[str]:
        return sorted({*super().__dir__(), *self._data})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self._data)!r})"

    def to_dict(self) -> Dict[str, Any]:
        """The object as plain dictionaries and lists, as the command's `--json` has it."""
        return copy.deepcopy(dict(self._data))


class Records(Sequence[Record]):
    """A list of JSON objects: a table."""

    __slots__ = ("_list",)

    _list: Sequence[Mapping[str, Any]]

    def __init__(self, objects: Sequence[Mapping[str, Any]]) -> None:
        self._list = objects

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> "Records": ...

    def __getitem__(self, index: Union[int, slice]) -> Union[Record, "Records"]:
        return Records(self._list[index]) if isinstance(index, slice) else Record(self._list[index])

    def __len__(self) -> int:
        return len(self._list)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(one == another for one, another in zip(self, other))

    # It has a list in it.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Records({list(self._list)!r})"

    def to_list(self) -> List[Dict[str, Any]]:
        """The objects as plain dictionaries."""
        return [copy.deepcopy(dict(found)) for found in self._list]

    def to_pandas(self) -> "pandas.DataFrame":
        """The table as a DataFrame, a column for each key."""
        frame: "pandas.DataFrame" = _pandas().DataFrame(self.to_list())
        return frame

    def _repr_html_(self) -> str:
        from . import _html

        return _html.records_table("", self)


def _wrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Record(value)
    # An empty list is a table without rows.
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        return Records(value)
    return value


def _pandas() -> Any:
    """The module pandas, which is needed for tables only."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "to_pandas() needs pandas: pip install pandas, or use to_dict() and the lists themselves"
        ) from error
    return pandas
