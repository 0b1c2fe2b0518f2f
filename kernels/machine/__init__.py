"""Executes compiled kernels (cubins for sm_80, sm_90, sm_90a) without a GPU."""

from kernels.machine.arguments import Struct
from kernels.machine.operands import NotUnderstoodError
from kernels.machine.program import Counts, MachineError, Program, Traffic, load
from kernels.machine.tensor_map import TensorMap

__all__ = ["Counts", "MachineError", "NotUnderstoodError", "Program", "Struct", "TensorMap", "Traffic", "load"]
