"""Reading a configuration's notations: protobuf text format and JSON, to a tree, to a message."""
