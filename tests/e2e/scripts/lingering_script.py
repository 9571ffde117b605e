"""The job of the fault tests, in a script with a thread that outlives the error of its training."""

import threading

from tmd.campaign.job import main

if __name__ == "__main__":
    try:
        main()
    except Exception:
        threading.Thread(target=threading.Event().wait).start()
        raise
