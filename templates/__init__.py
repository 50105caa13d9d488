"""The Jinja templates of the kernels: one ``<family>.py.j2`` a family, one ``<family>_<form>.py.j2`` an extra form."""
