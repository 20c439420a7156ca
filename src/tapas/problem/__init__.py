"""Graph, rules, routes and costs as variables and tables for the search; pins and baselines restrict it."""
