"""The project on the true Linux drivers, in QEMU: `make test-drivers`; docs/project/drivers.md."""
