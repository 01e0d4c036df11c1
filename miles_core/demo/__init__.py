"""The demonstration: a small mixture-of-experts model and a task it learns in minutes on a CPU."""
