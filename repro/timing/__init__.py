"""The model of time beside what was measured and published, and the choices that rest on it.

Clocks are predicted from machine code: of a prototype timed on an H200 (``prototype``,
``time_validation``), of FlashAttention-2, -3 and -4 as others ship them (``flash2_time`` to
``flash4_time``, compared in ``peers`` and ``ampere_validation``) and of our own kernels
(``round_clocks``, ``ampere_tiles``, ``packed_time``, ``hopper_choice``).
"""
