from kvtier.testing.codec import CodecKit


class TestRaw(CodecKit):
    plan = "raw"


class TestInt8(CodecKit):
    plan = "int8"


class TestInt4(CodecKit):
    plan = "int4"


class TestInt3(CodecKit):
    plan = "int3"


class TestFp8(CodecKit):
    plan = "fp8"


class TestK8V4(CodecKit):
    plan = "k8v4"


class TestLayered(CodecKit):
    plan = "layered"


class TestNested(CodecKit):
    """Exact first tokens inside a range of layers; every kind of scale; 3 bits; both 16-bit floats."""

    plan = (
        "layers(0-1/3:sinks:1(K=int3/group:32/asym/clip,V=e5m2/tensor/asym);"
        "1/3-2/3:K=fp16,V=int2/channel:16/asym/hadamard/clip;"
        "2/3-1:sinks:1(K=bf16,V=int3/token/sym/hadamard/lloyd))"
    )
