"""Python files that a user names, the only ones that are run: as they stand now, and nothing is left beside them."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType


class _AsItStands(SourceFileLoader):
    """Without bytecode, which knows a file by its second and its size: two versions may have both in common."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def run_file(label: str, path: str | Path) -> ModuleType:
    """Run a file as the module `label`, and what that module then is."""
    spec = spec_from_loader(label, _AsItStands(label, str(path)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[label] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
