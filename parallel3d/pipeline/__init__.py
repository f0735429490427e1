"""The pipeline: schedules as action tables, their simulation, and the executor that runs them."""
