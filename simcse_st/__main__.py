"""``python -m simcse_st``, for launchers such as torchrun."""

from simcse_st.cli import main

main()
