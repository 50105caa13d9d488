"""The sweep: measure schedules on a GPU, verify them, keep the winners as tuned rows (docs/tuning.md)."""
