"""Parses texts with protobuf's own Python reader.

Reads frames (four bytes of little-endian length, then that many bytes) from standard input: the
descriptor set first, then the texts. Answers each text with a frame: `+` and the serialized
message, or `-` and the error.
"""

import struct
import sys

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format


def frames(data):
    position = 0
    while position < len(data):
        (length,) = struct.unpack_from("<I", data, position)
        position += 4
        yield data[position : position + length]
        position += length


def main():
    descriptors, *texts = frames(sys.stdin.buffer.read())
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    message = pool.FindMessageTypeByName("inference.ModelConfig")
    config = message_factory.GetMessageClass(message)
    for text in texts:
        try:
            parsed = text_format.Parse(text, config())
            answer = b"+" + parsed.SerializeToString(deterministic=True)
        except Exception as error:  # Out-of-range values of enumerations raise ValueError.
            answer = b"-" + f"{type(error).__name__}: {error}".encode()
        sys.stdout.buffer.write(struct.pack("<I", len(answer)) + answer)


main()
