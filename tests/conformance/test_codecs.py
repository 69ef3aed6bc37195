from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.raw import RawCodec
from kvtier.testing.codec import CodecKit


class TestRaw(CodecKit):
    codec = RawCodec()


class TestInt8(CodecKit):
    codec = Int8Codec()
