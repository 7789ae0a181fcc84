"""The version of this distribution, its only source; apart, so that every module can import it."""

VERSION = "0.2.0"
