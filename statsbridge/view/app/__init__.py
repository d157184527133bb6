"""The live page: a module tree, pictures and findings of the runs of a folder, on this machine only.

Needs the extra `view` (Dash and its Mantine components), imported when `serve.Page` is made.
"""
