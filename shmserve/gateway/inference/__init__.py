"""An inference request, whatever protocol it came by: built, admitted, answered."""
