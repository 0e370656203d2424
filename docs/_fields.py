"""Griffe extension: the comment behind a field or a constant is its documentation, so the API pages show it."""

import ast

import griffe


class FieldComments(griffe.Extension):
    """Reads `name: type  # what it is`."""

    def on_attribute_instance(self, *, node, attr, agent, **kwargs):
        """Gives `attr` its trailing comment as a docstring where it has none."""
        del agent, kwargs
        if attr.docstring or not isinstance(node, ast.AST) or not attr.lineno:
            return
        line = attr.lines_collection[attr.filepath][attr.lineno - 1]
        _, found, comment = line[node.end_col_offset :].partition("# ")
        if found and node.lineno == node.end_lineno:
            attr.docstring = griffe.Docstring(comment.strip(), lineno=attr.lineno, parent=attr)
