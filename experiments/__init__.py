"""One module per experiment, each with `run(config, workdir)`; `launch.py` runs them and `report.py` shows them."""
