"""The flag of cuDNN's benchmark mode, which holds references to its getter and setter, as in PyTorch."""

from typing import Any, Callable

from .. import _C


class _Flag:
    def __init__(self, getter: Callable[[], bool], setter: Callable[[bool], None]) -> None:
        self.getter, self.setter = getter, setter

    def __get__(self, _object: Any, _type: Any) -> bool:
        return self.getter()

    def __set__(self, _object: Any, value: bool) -> None:
        self.setter(value)


class _Cudnn:
    benchmark = _Flag(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark)


cudnn = _Cudnn()
