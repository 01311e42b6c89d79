"""Showing traces and predictions to people: text, pictures, pages, tables, files."""
