"""Compiler for functions that are only linked into others: neither optimized nor loaded alone.

By default numba optimizes every function and makes machine code of it, again and again for one that
others inline: that was a third of the compile time.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class PartCompiler(CompilerBase):  # type: ignore[misc]  # numba has no types
    """Numba's default passes, except that the last one leaves the code for callers to link."""

    def define_pipelines(self) -> list[Any]:
        """Return the passes."""
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [
            (_PartLowering if step is NativeLowering else step, why) for step, why in manager.passes
        ]
        manager._finalized = False
        manager.finalize()
        return [manager]


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]  # numba has no types
    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return bool(super().run_pass(state))


class _Part(JITCodeLibrary):  # type: ignore[misc]  # numba has no types
    """Code of a function that is linked into its callers and has no address."""

    @property
    def codegen(self) -> Any:
        return _WithoutEnvironments(self._codegen)

    def get_pointer_to_function(self, _: str) -> int:
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _WithoutEnvironments:
    """A code generator for functions that have no address at which to store an environment."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, *_: object) -> None:
        """Do nothing."""
