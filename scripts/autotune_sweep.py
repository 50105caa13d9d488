#!/usr/bin/env python
"""Measure schedules on this machine's GPUs and write tuned rows: see --help and docs/tuning.md."""

from kdagen.tuning.command import main

if __name__ == "__main__":
    main()
