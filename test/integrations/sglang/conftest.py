"""The real SGLang, importable on a machine without a GPU."""

import import_stubs

import_stubs.install()
