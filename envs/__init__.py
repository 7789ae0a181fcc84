"""The world that answers: devices and links, placements, and backends that time a step."""
