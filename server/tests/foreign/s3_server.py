"""An S3-compatible server that says its port and serves until its input ends.

With `--signed` it makes a user and says the user's key and secret; once somebody posts `0` to
`/moto-api/reset-auth`, it compares every signature with the one that Amazon's own library makes.
"""

import json
import sys

from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"port {port}", flush=True)
if "--signed" in sys.argv:
    import boto3

    iam = boto3.client(
        "iam",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="nobody",
        aws_secret_access_key="nothing",
    )
    statement = {"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam.create_user(UserName="reader")
    iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=policy)
    made = iam.create_access_key(UserName="reader")["AccessKey"]
    print(f"key {made['AccessKeyId']} {made['SecretAccessKey']}", flush=True)
sys.stdin.read()
server.stop()
