"""Makers of display controllers, by PCI vendor number."""

VENDORS = {
    0x10DE: "NVIDIA",
    0x1002: "AMD",
    0x8086: "Intel",
    0x1A03: "ASPEED",
    0x102B: "Matrox",
    0x1AF4: "virtio",
    0x1B36: "QEMU",
    0x1234: "QEMU",
    0x15AD: "VMware",
    0x1414: "Microsoft",
    0x5143: "Qualcomm",
}
