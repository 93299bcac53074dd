"""The dashboard at / of a metrics listener, and the feed of figures that it shows.

page.py         the page (page.html), and the policy by which a browser runs nothing else
live.py         GET /live: figures as server-sent events, made while somebody watches
event_watch.py  what happens in the server, as the supervisor publishes it
"""
