"""The engines that attach probes. A new one is a file here and a line in `ENGINES` of `capture`."""
