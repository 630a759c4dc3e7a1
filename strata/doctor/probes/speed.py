"""How fast bytes move: RAM, to the device from pinned and pageable memory, and within the device."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from strata.doctor.facts import SpeedFacts
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.cuda import device_uuid, driver_library, import_cupy
from strata.doctor.probes.host import usable_processors
from strata.doctor.probes.nvml_gauge import NvmlGauge
from strata.doctor.probes.request import ProbeRequest

MIB = 1 << 20
COPY_BYTES = 256 * MIB
SLICE_BYTES = 8 * MIB  # of the pinned ring through which pageable memory is staged
PASSES = 3  # the best one counts: anything else running only slows a pass down
LOADED_COPIES = 16  # copies in flight while the link is read: idle links run slower than they can
_ALLOC_FLAGS = 3  # cudaHostAllocPortable | cudaHostAllocMapped
_DEVICE_FIELDS = ("h2d_pinned_bytes_per_s", "h2d_pageable_bytes_per_s", "h2d_staged_bytes_per_s")
