"""Telemetry: metrics, logs, traces and profiles of a running server."""
