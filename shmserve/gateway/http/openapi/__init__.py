"""The OpenAPI description of the HTTP API, made of the table of routes: /openapi.json, and /docs,
the page that shows it.

operations.py    what the routes take and give
page.html        the page
"""
