"""The driver's and CUDA's views of GPUs, matched by UUID."""

import msgspec

from strata.doctor.facts import CudaDevice, CudaFacts, NvmlFacts, NvmlGpu
from strata.doctor.gpus import choose_gpu, gpus
from tests.doctor.machines_with_gpus import gpu_machine
from tests.doctor.shapes import GIB

BASE = gpu_machine(vram_total=GIB, vram_free=GIB, ram=GIB)
NVML = NvmlFacts(gpus=(NvmlGpu(index=0, name="slow", uuid="GPU-s"), NvmlGpu(index=1, name="fast", uuid="GPU-f")))
CUDA = CudaFacts(devices=(CudaDevice(ordinal=0, uuid="GPU-f"), CudaDevice(ordinal=1, uuid="GPU-s")))


def with_views(nvml: NvmlFacts | None, cuda: CudaFacts | None):
    return msgspec.structs.replace(
        BASE,
        nvml=msgspec.structs.replace(BASE.nvml, value=nvml),
        cuda=msgspec.structs.replace(BASE.cuda, value=cuda),
    )


def test_the_first_is_cudas_first_whatever_the_bus_says():
    facts = with_views(NVML, CUDA)
    assert [gpu.name for gpu in gpus(facts)] == ["fast", "slow"]
    assert choose_gpu(facts, None).uuid == "GPU-f"


def test_an_index_is_that_of_nvidia_smi():
    assert choose_gpu(with_views(NVML, CUDA), "0").name == "slow"


def test_one_view_is_enough():
    assert [gpu.uuid for gpu in gpus(with_views(None, CUDA))] == ["GPU-f", "GPU-s"]
    assert [gpu.uuid for gpu in gpus(with_views(NVML, None))] == ["GPU-s", "GPU-f"]


def test_a_gpu_that_cuda_does_not_see_comes_last():
    hidden = CudaFacts(devices=CUDA.devices[:1])
    assert [gpu.uuid for gpu in gpus(with_views(NVML, hidden))] == ["GPU-f", "GPU-s"]
