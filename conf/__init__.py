"""Hydra configuration files (YAML only); a package so that Hydra finds it as pkg://conf."""
