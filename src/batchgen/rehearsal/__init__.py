"""The real pipeline over hollow components: memory, work and calls of a stage without weights or a device."""
