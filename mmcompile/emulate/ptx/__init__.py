"""PTX as Triton emits it for sm_90a, sm_100a, sm_100f, sm_103a and sm_107a, executed with numpy lanes."""
