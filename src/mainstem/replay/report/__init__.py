"""Reports: charts and pages made from the rows of a replay."""
