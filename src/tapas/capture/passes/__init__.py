"""Passes over captured calls: each makes one spelling of one meaning."""
